"""The conformance run of a job: `python -m mpx doctor --cluster`."""
