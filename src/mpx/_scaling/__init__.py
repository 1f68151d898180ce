"""Loss scaling: none, static, dynamic."""
