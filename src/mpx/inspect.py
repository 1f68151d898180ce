"""Reports on what mixed precision does with a function, and checks of what was compiled."""

from mpx._fp8 import Fp8Check as Fp8Check
from mpx._fp8 import check as check
from mpx._inspect._doctor import Diagnosis as Diagnosis
from mpx._inspect._doctor import doctor as doctor
from mpx._inspect._explain import Explanation as Explanation
from mpx._inspect._explain import explain as explain
from mpx._inspect._exponents import ExponentStats as ExponentStats
from mpx._inspect._exponents import exponent_stats as exponent_stats
from mpx._inspect._faults import Fault as Fault
from mpx._inspect._memory import Memory as Memory
from mpx._inspect._memory import memory as memory
from mpx._inspect._observation import Observation as Observation
from mpx._inspect._observation import observe as observe
from mpx._inspect._plots import plot_exponents as plot_exponents
from mpx._inspect._report import Report as Report
from mpx._inspect._report import report as report
from mpx._inspect._run_summary import RunSummary as RunSummary
from mpx._inspect._run_summary import Skip as Skip
from mpx._inspect._target import Compiled as Compiled
from mpx._inspect._views import AmpView as AmpView
from mpx._inspect._views import Fp8View as Fp8View
from mpx._inspect._watch import Watch as Watch
from mpx._inspect._watch import watch as watch
