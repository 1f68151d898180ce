"""From equations to operations: attention, however it is written."""
