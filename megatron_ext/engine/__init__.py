"""Training steps: schedules executed, gradients summed, weights updated."""
