"""The rules that join several parts of an experiment; each raises `ConfigError` where it is broken."""
