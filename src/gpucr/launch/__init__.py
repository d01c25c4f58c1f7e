"""What is known of the jobs that gpucr started: their environment, their names, and the registry of them."""
