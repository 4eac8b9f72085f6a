"""The pixels as features, and a support vector classifier of digits."""

import numpy as np


class PixelDetector:
    """The pixels in [0, 1] as features."""

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """images (N, H, W, C) uint8 -> pixels (N, H * W * C) float64."""
        return {"pixels": images.reshape(len(images), -1) / 255}


class DigitClassifier(PixelDetector):
    """The pixels as features, and the digit that a support vector classifier recognises."""

    def fit(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Fit the classifier on real digits (N, H, W, C) uint8 and their classes."""
        from sklearn.svm import SVC

        # Kernel width as in scikit-learn's digits example: gamma 0.001 for pixels 0..16.
        classifier = SVC(gamma=0.001 * 16**2, C=10, random_state=0)
        self._classifier = classifier.fit(super().__call__(images)["pixels"], labels)

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """images (N, H, W, C) uint8 -> pixels (N, H * W * C) float64, classes (N,)."""
        features = super().__call__(images)
        return {**features, "classes": self._classifier.predict(features["pixels"])}
