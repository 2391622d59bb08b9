"""A PyTorch training loop that clips with gradkit.

``clip_grad_norm`` replaces ``torch.nn.utils.clip_grad_norm_``. It takes gradients, not parameters,
writes them in place, and returns the norm before clipping as a tensor.
"""

import torch

import gradkit


def main(steps: int = 60, max_norm: float = 1.0, micro_batches: int = 4) -> list[float]:
    """Fit a small network to a sine and return the losses."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x = torch.linspace(-3, 3, 256, device=device)[:, None]
    y = torch.sin(x)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = torch.nn.functional.mse_loss(model(xs), ys) / micro_batches
            loss.backward()
            total += loss.item()

        # Before: norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = gradkit.clip_grad_norm(gradkit.grads_of(model.parameters()), max_norm)

        optimizer.step()
        losses.append(total)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; last gradient norm {float(norm):.3f}")
    return losses


if __name__ == "__main__":
    main()
