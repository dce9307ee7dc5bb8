"""What a command line leaves open, decided before anything is started; and what would fail only on the ranks."""
