"""What each rank does when: operations, the schedules made of them, and the proof that they never wait in vain."""
