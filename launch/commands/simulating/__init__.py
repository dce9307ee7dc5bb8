"""The ways of `tdpp simulate`: an experiment on its cluster, or servers that IIDP or JABAS profiled."""
