"""Norms over ranks and over devices, here threads of one process and emulated devices."""
