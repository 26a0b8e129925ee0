"""What is asked and who judges: the built-in task, its warm start, data sets, verifiers."""
