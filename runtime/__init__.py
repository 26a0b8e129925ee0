"""What it takes to run: flags, model, trainer, engine, weight channels, a run's folder."""
