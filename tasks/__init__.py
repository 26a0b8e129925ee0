"""What is asked and who judges: prompts, the built-in tasks and their warm start, data sets, verifiers, judges."""
