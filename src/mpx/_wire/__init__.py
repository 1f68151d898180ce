"""The dtype of gradients on their way between devices."""
