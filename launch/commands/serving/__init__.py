"""The pages of runs, served to a browser on this machine (`tdpp report --serve`)."""
