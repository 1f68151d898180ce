"""Reports on what mixed precision does with a function, and checks of what was compiled."""
# pyright: reportUnknownVariableType=false

from mpx._fp8 import Fp8Check as Fp8Check
from mpx._fp8 import fp8_check as fp8_check
from mpx.inspect._advice import Advice as Advice
from mpx.inspect._advice import Candidate as Candidate
from mpx.inspect._advice import GroupAdvice as GroupAdvice
from mpx.inspect._advice import PrecisionPolicy as PrecisionPolicy
from mpx.inspect._advice import advise as advise
from mpx.inspect._collectives import Collective as Collective
from mpx.inspect._collectives import collectives as collectives
from mpx.inspect._doctor import Diagnosis as Diagnosis
from mpx.inspect._doctor import doctor as doctor
from mpx.inspect._explain import Explanation as Explanation
from mpx.inspect._explain import Finding as Finding
from mpx.inspect._explain import explain as explain
from mpx.inspect._exponents import ExponentStats as ExponentStats
from mpx.inspect._exponents import exponent_stats as exponent_stats
from mpx.inspect._exponents import plot_exponents as plot_exponents
from mpx.inspect._memory import Memory as Memory
from mpx.inspect._memory import memory as memory
from mpx.inspect._report import AmpView as AmpView
from mpx.inspect._report import Fp8View as Fp8View
from mpx.inspect._report import Report as Report
from mpx.inspect._report import report as report
from mpx.inspect._residuals import residual_errors as residual_errors
from mpx.inspect._watch import Observation as Observation
from mpx.inspect._watch import RunSummary as RunSummary
from mpx.inspect._watch import Skip as Skip
from mpx.inspect._watch import Watch as Watch
from mpx.inspect._watch import observe as observe
from mpx.inspect._watch import watch as watch
