"""What a job has outside its own memory: files, connections, shared memory, CPU affinity."""
