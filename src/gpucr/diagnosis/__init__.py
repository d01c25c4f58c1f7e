"""What is wrong, or could go wrong: findings about a job before anything is changed, and measured ones of a machine."""
