"""Agreement with ONNX Runtime Training's own CPU operators; see README.md."""
