"""The pixels as features, and a support vector classifier of digits."""

import numpy as np


class PixelDetector:
    """The pixels themselves, in [0, 1]."""

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """images (N, H, W, C) uint8 -> features (N, H * W * C) float64."""
        return images.reshape(len(images), -1) / 255


class DigitJudge:
    """The pixels, and a support vector classifier that tells which digit an image shows.

    Args:
        images, labels: real digits (N, H, W, C) uint8 and their classes, to fit on.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        from sklearn.svm import SVC

        self._detector = PixelDetector()
        # Kernel width and penalty as in scikit-learn's own digits example (pixels 0..16, gamma 0.001), in our
        # units.
        self._classifier = SVC(gamma=0.001 * 16**2, C=10, random_state=0).fit(self._detector(images), labels)

    def __call__(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """images (N, H, W, C) uint8 -> features (N, H * W * C) float64, classes (N,)."""
        features = self._detector(images)
        return features, self._classifier.predict(features)
