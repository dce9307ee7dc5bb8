"""What a run logs, carried to TensorBoard, Weights & Biases and MLflow.

Their libraries are imported where a run is written to them: they are heavy, and need not be installed.
"""
