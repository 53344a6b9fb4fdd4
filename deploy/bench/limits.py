"""What this machine can do at most, measured with the threads that a model would use: the limits that figures are held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.driver import compile_module
from compiler.ir.parser import parse
from deploy.bench.measure import best_s
from runtime.device.cpu import host_buffer
from runtime.session import Session

READ_BYTES = 512 << 20
_BLOCK = 1 << 16  # elements that one claim reads

_READ = """
func main(x: f32[n, 65536]) -> f32[n] {{
  y: f32[n] = call_tir @read(x) -> f32[n]
  return y
}}
prim read(x: f32[n, 65536], out y: f32[n]) attrs {{schedule="none"}} {{
  for parallel p in n {{
    alloc local a: f32[{streams}, 16] {{
      for unroll s in {streams} {{ for vector l in 16 {{ a[s, l] = 0.0 }} }}
      for i in {steps} {{
        for unroll s in {streams} {{
          for vector l in 16 {{ a[s, l] = a[s, l] + x[p, {span}*s + 16*i + l] }}
        }}
      }}
      for unroll s in {streams} {{ for vector l in 16 {{ a[0, l] = a[0, l] + a[s, l] }} }}
      y[p] = a[0, 0]
    }}
  }}
}}
"""

_PEAK = """
func main(x: f32[16], steps: shape[n]) -> f32[64] {
  y: f32[64] = call_tir @peak(x, dim(n)) -> f32[64]
  return y
}
prim peak(x: f32[16], n: dim, out y: f32[64]) attrs {schedule="none"} {
  for parallel p in 64 {
    alloc local a: f32[12, 16] {
      for unroll s in 12 { for vector l in 16 { a[s, l] = x[l] } }
      for i in n {
        for unroll s in 12 { for vector l in 16 { a[s, l] = fma(a[s, l], x[l], x[l]) } }
      }
      for unroll s in 12 { for vector l in 16 { a[0, l] = a[0, l] + a[s, l] } }
      y[p] = a[0, 0]
    }
  }
}
"""


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float
    flops_f32: float  # multiply-adds in f32, two operations each

    def seconds(self, num_bytes: float, operations: float) -> float:
        return max(num_bytes / self.bytes_per_s, operations / self.flops_f32)


def measure_limits(threads: int | None = None) -> Limits:
    x = host_buffer(READ_BYTES).view(np.float32).reshape(-1, _BLOCK)
    x[...] = 1.0
    rates: list[float] = []
    for streams in (1, 2, 4, 8):
        span = _BLOCK // streams
        session = Session(compile_module(parse(_READ.format(streams=streams, span=span, steps=span // 16))), device_threads=threads)
        rates.append(READ_BYTES / best_s(lambda s=session: s.call("main", x), seconds=0.6))
        session.close()
    session = Session(compile_module(parse(_PEAK)), device_threads=threads)
    steps, y = 20_000, np.full(16, 0.5, np.float32)
    seconds = best_s(lambda: session.call("main", y, (steps,)), seconds=0.6)
    session.close()
    return Limits(max(rates), 64 * steps * 12 * 16 * 2 / seconds)
