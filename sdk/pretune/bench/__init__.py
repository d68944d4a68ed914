"""Benchmarks of pretune against stock MetaSchedule, one module each: ``run`` measures, ``render`` prints."""
