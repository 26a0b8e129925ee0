"""Answers that are programs, run where they can do no harm. This folder needs nothing of ours: copy it as it is."""
