"""planaria trains large PyTorch models on nodes that fail."""

__version__ = "0.1.0"
