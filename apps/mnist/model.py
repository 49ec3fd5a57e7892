"""A small convolutional network for pictures of digits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):  # type: ignore[misc]
    """28 x 28 pixels in, the logarithms of ten probabilities out; 1,201,382 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout2d(0.5)  # whole channels
        self.dropout2 = nn.Dropout2d(0.75)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 20)
        self.fc3 = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, 1, 28, 28)."""
        x = F.relu(self.conv1(x))  # 32 channels of 26 x 26
        x = F.relu(self.conv2(x))  # 64 channels of 24 x 24
        x = self.dropout1(F.max_pool2d(x, 2))  # 64 channels of 12 x 12, together 9216
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.dropout2(x[:, :, None, None])[:, :, 0, 0]  # 128 channels of one pixel
        x = F.relu(self.fc2(x))
        return F.log_softmax(self.fc3(x), dim=1)
