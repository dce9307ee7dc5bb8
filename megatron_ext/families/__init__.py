"""Model families, a folder each: `__init__.py` describes the family without torch, `task.py` trains it."""
