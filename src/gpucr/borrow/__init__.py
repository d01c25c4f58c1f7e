"""GPUs and the jobs that share them: several jobs suspended and resumed at once, GPUs lent by priority."""
