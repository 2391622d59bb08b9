"""cuDNN: what can be shown without a GPU, and with one."""
