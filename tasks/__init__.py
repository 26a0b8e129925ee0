"""What is asked and who judges: prompts, the built-in task and its warm start, data sets, verifiers, judges."""
