"""What is written beside the pages: tables and traces."""
