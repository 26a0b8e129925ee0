"""What the model is asked and how its answers are judged: prompts, the built-in task and its warm start, data sets,
verifiers, judges."""
