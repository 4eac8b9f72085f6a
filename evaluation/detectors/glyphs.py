"""A small convolutional classifier of glyphs, and its last hidden layer as features."""

from itertools import pairwise

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class GlyphClassifier:
    """A convolutional classifier on the CPU, reproducible for the same images and number of threads."""

    WIDTHS, NUM_FEATURES = (32, 64, 128), 128
    MAX_IMAGES, EPOCHS, BATCH_SIZE, LR = 2**14, 4, 128, 5e-3
    IMAGES_AT_ONCE = 512
    MAX_NOISE = 32 / 127.5  # standard deviation of noise on images in [-1, 1]: 32 grey levels

    @torch.enable_grad()
    def fit(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Fit the classifier on real images (N, H, W, C) uint8 and their classes."""
        generator = torch.Generator().manual_seed(0)
        indices = torch.randperm(len(images), generator=generator)[: self.MAX_IMAGES].numpy()
        with torch.random.fork_rng(devices=[]):  # training's random state stays unchanged
            torch.default_generator.manual_seed(0)
            self._build(images.shape[-1], int(labels.max()) + 1)
        self._fit(_pixels(images[indices]), torch.from_numpy(labels[indices]), generator)

    @torch.no_grad()
    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """images (N, H, W, C) uint8 -> the last hidden layer (N, F) float64, classes (N,)."""
        starts = range(0, len(images), self.IMAGES_AT_ONCE)
        parts = [self._hidden(_pixels(images[i : i + self.IMAGES_AT_ONCE])) for i in starts]
        hidden = torch.cat(parts)  # (N, F)
        return {"hidden": hidden.double().numpy(), "classes": self._output(hidden).argmax(dim=1).numpy()}

    def _build(self, in_channels: int, num_classes: int) -> None:
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise((in_channels, *self.WIDTHS)):
            conv = nn.Conv2d(width_in, width_out, 3, stride=2, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(width_out), nn.ReLU()]
        linear = nn.Linear(self.WIDTHS[-1] * 4**2, self.NUM_FEATURES)
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), linear, nn.ReLU()]  # (N, F)
        # Unit variance gives distances a fixed scale.
        layers.append(nn.BatchNorm1d(self.NUM_FEATURES, affine=False))
        self._hidden = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # twice as fast
        self._output = nn.Linear(self.NUM_FEATURES, num_classes)

    def _fit(self, pixels: torch.Tensor, classes: torch.Tensor, generator: torch.Generator) -> None:
        batch_size = min(self.BATCH_SIZE, len(pixels))
        num_batches = len(pixels) // batch_size
        optimizer = torch.optim.AdamW([*self._hidden.parameters(), *self._output.parameters()])
        num_steps = self.EPOCHS * num_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.LR, total_steps=num_steps)
        for _ in range(self.EPOCHS):
            order = torch.randperm(len(pixels), generator=generator)[: num_batches * batch_size]
            for ids in order.view(-1, batch_size):
                optimizer.zero_grad()
                noisy = self._with_noise(pixels[ids], generator)
                F.cross_entropy(self._output(self._hidden(noisy)), classes[ids]).backward()
                optimizer.step()
                schedule.step()
        self._hidden.eval()

    def _with_noise(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Add noise to about half of the images, so that features depend little on invisible noise."""
        shape = (len(pixels), 1, 1, 1)
        strength, coin = (torch.rand(shape, generator=generator) for _ in range(2))
        noise = torch.randn(pixels.shape, generator=generator)
        return (pixels + (coin < 0.5) * (self.MAX_NOISE * strength) * noise).clamp(-1, 1)


def _pixels(images: np.ndarray) -> torch.Tensor:
    """images (N, H, W, C) uint8 -> (N, C, H, W) in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
