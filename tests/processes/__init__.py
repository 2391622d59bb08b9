"""Norms and clipping over real processes: MPI, torch.distributed and JAX (`make test-ranks`)."""
