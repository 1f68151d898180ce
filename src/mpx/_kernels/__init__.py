"""Kernels that step parameters. They hold no maths: the step is passed in."""

from mpx._kernels._dispatch import BACKENDS as BACKENDS
from mpx._kernels._dispatch import Backend as Backend
from mpx._kernels._dispatch import Job as Job
from mpx._kernels._dispatch import plain_under_vmap as plain_under_vmap
from mpx._kernels._dispatch import run as run
from mpx._kernels._plain import Body as Body
