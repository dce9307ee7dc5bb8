"""Run folders and logs, read into typed values."""
