"""Files and words of users, read as Hydra reads them, with one message for what is wrong with one."""
