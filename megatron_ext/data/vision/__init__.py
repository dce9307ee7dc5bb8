"""Images and videos."""
