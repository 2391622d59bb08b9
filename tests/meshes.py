"""Models cut over ranks, drawn at random; the parameters look like PyTorch's, without PyTorch."""

from types import SimpleNamespace

import numpy as np

from gradkit.distributed import shards_of


class Shard:
    """Placements as torch.distributed.tensor has them: a copy, a share, a share of each chunk."""

    def __init__(self, dim=None, split_factor=1):
        if dim is not None:
            self.dim, self.split_factor = dim, split_factor

    def is_replicate(self):
        return not hasattr(self, "dim")

    def is_partial(self):
        return False


class Mesh:
    """A device mesh as one of its ranks sees it."""

    def __init__(self, mesh, rank):
        self.mesh, self.shape = np.asarray(mesh), np.shape(mesh)
        found = np.argwhere(self.mesh == rank)
        self.coordinate = found[0].tolist() if len(found) else None

    def get_coordinate(self):
        return self.coordinate


def chunk(x, pieces, index, dim):
    """As torch.chunk."""
    step = -(-x.shape[dim] // pieces)
    return x.take(
        range(min(index * step, x.shape[dim]), min((index + 1) * step, x.shape[dim])), dim
    )


def local_of(whole, mesh, placements):
    """Part of a whole tensor that a rank has."""
    if mesh.coordinate is None:
        return np.zeros((0,) * whole.ndim)
    for pieces, index, placement in zip(mesh.shape, mesh.coordinate, placements, strict=True):
        if not placement.is_replicate():
            dim, splits = placement.dim, placement.split_factor
            chunks = [chunk(whole, splits, k, dim) for k in range(splits)]
            whole = np.concatenate([chunk(c, pieces, index, dim) for c in chunks], dim)
    return whole


def dtensor(whole, mesh, *placements, grad=True, make=np.array):
    """A parameter whose gradient is a DTensor."""
    local = make(local_of(whole, mesh, placements))
    placed = SimpleNamespace(
        shape=whole.shape, device_mesh=mesh, placements=placements, to_local=lambda: local
    )
    placed.grad = placed if grad else None
    return SimpleNamespace(**vars(placed)) if grad else placed


def plain(whole):
    return SimpleNamespace(grad=np.array(whole) if isinstance(whole, np.ndarray) else whole)


class Layout:
    """A model drawn at random, cut by pipeline, data, expert and tensor parallelism."""

    def __init__(self, seed, size=None):
        self.rng = rng = np.random.default_rng(seed)
        self.size = size or int(rng.integers(1, 9))
        cuts = [(p, d) for p in range(1, 9) for d in range(1, 9) if self.size % (p * d) == 0]
        pp, dp = cuts[rng.integers(len(cuts))]
        self.grid = np.arange(self.size).reshape(pp, dp, -1)
        self.tensors = [self._tensor(k) for k in range(rng.integers(1, 8))]

    def _tensor(self, number):
        rng, (pp, dp, _) = self.rng, self.grid.shape
        kind = rng.choice(["mesh", "rows", "copies", "own", "tied", "experts"])
        shape = tuple(rng.integers(0, 10, rng.integers(1, 4)))
        placements = [self._placement(len(shape)) for _ in range(2)]
        more = {"own": ((), (self.size,)), "experts": ((rng.integers(1, dp + 1),), ())}
        before, after = more.get(kind, ((), ()))
        whole = rng.standard_normal((*before, *shape, *after)) * 10.0 ** rng.integers(-9, 9)
        return f"layer.{number}", kind, int(rng.integers(pp)), whole, placements

    def _placement(self, ndim):
        if self.rng.random() < 0.5:
            return Shard()
        return Shard(int(self.rng.integers(ndim)), int(self.rng.choice([1, 1, 2, 3])))

    def shards(self, group, make=np.array):
        """Shards of one rank; ``make``: its gradients from NumPy arrays."""
        stage, data, tensor = np.argwhere(self.grid == group.rank)[0]
        found, names, kinds = {}, {}, {}
        for name, kind, at, whole, placements in self.tensors:
            if kind == "tied" and stage in (at, len(self.grid) - 1):
                local = name if stage == at else f"{name}.head"
                found[local], kinds[local], names[local] = plain(make(whole)), "copies", name
            elif kind == "tied" or stage != at:
                continue
            elif kind in ("mesh", "rows"):
                ranks = self.grid[stage] if kind == "mesh" else self.grid[stage, :, tensor]
                mesh = Mesh(ranks, group.rank)
                found[name] = dtensor(whole, mesh, *placements[: ranks.ndim], make=make)
            elif kind == "experts":  # copies, if there are fewer than ranks of data parallelism
                local, expert = f"{name}.expert", data % len(whole)
                found[local], kinds[local] = plain(make(whole[expert])), "copies"
                names[local] = f"{name}.{expert}"
            else:
                part = whole if kind == "copies" else whole[..., group.rank]
                found[name], kinds[name] = plain(make(part)), kind
        return shards_of(found, group=group, names=names, plain=kinds)

    def wholes(self):
        """The gradients of the uncut model."""
        for _, kind, at, whole, _ in self.tensors:
            yield whole[..., self.grid[at].reshape(-1)] if kind == "own" else whole
