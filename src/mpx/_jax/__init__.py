"""The JAX, devices, frameworks and trees that mpx finds: all that depends on versions."""
