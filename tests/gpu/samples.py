"""Small kernels in LLVM IR that use the hardware as real kernels do. Tests run each kernel unchanged, and again with one mistake in it."""

from __future__ import annotations

HEAD = """
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32)
declare void @llvm.nvvm.bar.warp.sync(i32)
"""


def _folded(start: str, result: str) -> str:
    """Return IR that sums a value over the 32 lanes of a warp."""
    lines, last = [], start
    for step in (16, 8, 4, 2, 1):
        now = result if step == 1 else f"%{result[1:]}{step}"
        lines += [f"  %x{result[1:]}{step} = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float {last}, i32 {step}, i32 31)"]
        lines += [f"  {now} = fadd float {last}, %x{result[1:]}{step}"]
        last = now
    return "\n".join(lines)


# A kernel that sums a row of 128 numbers per block: within each warp, then across warps through shared memory. Each row has a
# block of 128 threads.
ROW_SUM = f"""{HEAD}
@part = internal addrspace(3) global [4 x float] undef, align 16
define ptx_kernel void @row_sum(ptr addrspace(1) %in, ptr addrspace(1) %out) "nvvm.maxntid"="128" {{
entry:
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %b = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %row = mul i32 %b, 512
  %col = mul i32 %t, 4
  %at = add i32 %row, %col
  %atl = zext i32 %at to i64
  %p = getelementptr i8, ptr addrspace(1) %in, i64 %atl
  %v = load float, ptr addrspace(1) %p
{_folded("%v", "%warp")}
  %lane = and i32 %t, 31
  %first = icmp eq i32 %lane, 0
  br i1 %first, label %put, label %meet
put:
  %w = lshr i32 %t, 5
  %q = getelementptr float, ptr addrspace(3) @part, i32 %w
  store float %warp, ptr addrspace(3) %q
  br label %meet
meet:
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  %a0 = load float, ptr addrspace(3) @part
  %q1 = getelementptr float, ptr addrspace(3) @part, i32 1
  %a1 = load float, ptr addrspace(3) %q1
  %q2 = getelementptr float, ptr addrspace(3) @part, i32 2
  %a2 = load float, ptr addrspace(3) %q2
  %q3 = getelementptr float, ptr addrspace(3) @part, i32 3
  %a3 = load float, ptr addrspace(3) %q3
  %s1 = fadd float %a0, %a1
  %s2 = fadd float %a2, %a3
  %s = fadd float %s1, %s2
  %one = icmp eq i32 %t, 0
  br i1 %one, label %write, label %end
write:
  %o = getelementptr float, ptr addrspace(1) %out, i32 %b
  store float %s, ptr addrspace(1) %o
  br label %end
end:
  ret void
}}
"""


def _asm(text: str, constraints: str = "", arguments: str = "", result: str = "void") -> str:
    return f'call {result} asm sideeffect "{text}", "{constraints}"({arguments})'


# A kernel that computes c[16, 8] = a[16, 32] b[8, 32]^T in bf16. Each of the two steps along K uses its own stage of shared memory. The
# grid has one block of 32 threads.
def tile() -> str:
    lines = []
    for step in range(2):
        lines += [
            f"  %ga{step} = getelementptr i8, ptr addrspace(1) %a, i64 %from{step}",
            f"  %sa{step} = add i32 %to, {step * 768}",
            "  " + _asm("cp.async.cg.shared.global [$0], [$1], 16;", "r,l", f"i32 %sa{step}, ptr addrspace(1) %ga{step}"),
            f"  br i1 %half, label %b{step}, label %go{step}",
            f"b{step}:",
            f"  %gb{step} = getelementptr i8, ptr addrspace(1) %b, i64 %from{step}",
            f"  %sb{step} = add i32 %to, {step * 768 + 512}",
            "  " + _asm("cp.async.cg.shared.global [$0], [$1], 16;", "r,l", f"i32 %sb{step}, ptr addrspace(1) %gb{step}"),
            f"  br label %go{step}",
            f"go{step}:",
            "  " + _asm("cp.async.commit_group;"),
        ]
    last = ["float 0.0"] * 4
    for step in range(2):
        lines += [
            "  " + _asm(f"cp.async.wait_group {1 - step};"),
            "  call void @llvm.nvvm.bar.warp.sync(i32 -1)",
            f"  %pa{step} = add i32 %rows_a, {step * 768}",
            f"  %pb{step} = add i32 %rows_b, {step * 768 + 512}",
            f"  %A{step} = "
            + _asm(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,r",
                f"i32 %pa{step}",
                "{i32, i32, i32, i32}",
            ),
            f"  %B{step} = " + _asm("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];", "=r,=r,r", f"i32 %pb{step}", "{i32, i32}"),
            *(f"  %a{step}{i} = extractvalue {{i32, i32, i32, i32}} %A{step}, {i}" for i in range(4)),
            *(f"  %b{step}{i} = extractvalue {{i32, i32}} %B{step}, {i}" for i in range(2)),
            f"  %D{step} = "
            + _asm(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                ", ".join([*(f"i32 %a{step}{i}" for i in range(4)), *(f"i32 %b{step}{i}" for i in range(2)), *last]),
                "{float, float, float, float}",
            ),
            *(f"  %d{step}{i} = extractvalue {{float, float, float, float}} %D{step}, {i}" for i in range(4)),
        ]
        last = [f"float %d{step}{i}" for i in range(4)]
    body = "\n".join(lines)
    stores = "\n".join(
        f"  %po{i} = getelementptr float, ptr addrspace(1) %o, i32 {i // 2 * 64 + i % 2}\n  store float %d1{i}, ptr addrspace(1) %po{i}"
        for i in range(4)
    )
    return f"""{HEAD}
@stages = internal addrspace(3) global [1536 x i8] undef, align 128
define ptx_kernel void @tile(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %c) "nvvm.maxntid"="32" {{
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %base = ptrtoint ptr addrspace(3) @stages to i32
  %o16 = shl i32 %t, 4
  %to = add i32 %base, %o16
  %r = lshr i32 %t, 1
  %h = and i32 %t, 1
  %r64 = shl i32 %r, 6
  %h16 = shl i32 %h, 4
  %f0 = add i32 %r64, %h16
  %f1 = add i32 %f0, 32
  %from0 = zext i32 %f0 to i64
  %from1 = zext i32 %f1 to i64
  %half = icmp ult i32 %t, 16
  %ra = and i32 %t, 15
  %ra32 = shl i32 %ra, 5
  %ha = lshr i32 %t, 4
  %ha16 = shl i32 %ha, 4
  %pa = add i32 %ra32, %ha16
  %rows_a = add i32 %base, %pa
  %rb = and i32 %t, 7
  %rb32 = shl i32 %rb, 5
  %hb = lshr i32 %t, 3
  %hb1 = and i32 %hb, 1
  %hb16 = shl i32 %hb1, 4
  %pb = add i32 %rb32, %hb16
  %rows_b = add i32 %base, %pb
{body}
  %q = lshr i32 %t, 2
  %x = and i32 %t, 3
  %q8 = shl i32 %q, 3
  %x2 = shl i32 %x, 1
  %e = add i32 %q8, %x2
  %o = getelementptr float, ptr addrspace(1) %c, i32 %e
{stores}
  ret void
}}
"""


A_BYTES, B_BYTES = 64 * 128, 8 * 128
STAGE = A_BYTES + B_BYTES
# Offsets in shared memory of mbarriers, one per stage: those that signal that a stage is full, and those that signal that it is empty.
FULL, EMPTY = 2 * STAGE, 2 * STAGE + 16
PIPELINE_SHARED = EMPTY + 16


def _wait(name: str, barrier: str, parity: str, after: str, before: str) -> str:
    test = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }"
    return f"""  br label %{name}
{name}:
  %{name}_done = {_asm(test, "=r,r,r", f"i32 {barrier}, i32 {parity}", "i32")}
  %{name}_no = icmp eq i32 %{name}_done, 0
  br i1 %{name}_no, label %{name}, label %{after}
{after}:"""


def pipeline() -> str:
    """Return a kernel that computes out[8, 64] = x[8, k] w[64, k]^T in bf16. One thread of warpgroup 1 copies to two stages alternately,
    and warpgroup 0 multiplies by wgmma. The grid has one block of 256 threads."""
    steps = "add.s64 a, a, 2; add.s64 b, b, 2; "
    one = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0,$1,$2,$3}, a, b, p, 1, 1, 0, 0; "
    products = (
        "{ .reg .b64 a, b; .reg .pred p; setp.eq.u32 p, 1, 1; mov.b64 a, $4; mov.b64 b, $5; wgmma.fence.sync.aligned; "
        + one
        + (steps + one) * 3
        + "wgmma.commit_group.sync.aligned; }"
    )
    operands = "i64 %da, i64 %db, " + ", ".join(f"float %c{i}" for i in range(4))
    multiplied = _asm(products, "=f,=f,=f,=f,l,l,0,1,2,3", operands, "{float, float, float, float}")
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], SIZE, [$2];"
    phi = "\n".join(f"  %c{i} = phi float [0.0, %consumer], [%n{i}, %next]" for i in range(4))
    new = "\n".join(f"  %n{i} = extractvalue {{float, float, float, float}} %D, {i}" for i in range(4))
    store = "\n".join(
        f"  %po{i} = getelementptr float, ptr addrspace(1) %o, i32 {i // 2 * 8 + i % 2 * 64}\n  store float %n{i}, ptr addrspace(1) %po{i}"
        for i in range(4)
    )
    inits = "\n".join(
        f"  %i{at} = add i32 %base, {at}\n  " + _asm("mbarrier.init.shared.b64 [$0], $1;", "r,r", f"i32 %i{at}, i32 {count}")
        for at, count in ((FULL, 1), (FULL + 8, 1), (EMPTY, 128), (EMPTY + 8, 128))
    )
    return f"""{HEAD}
declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32)
@smem = external addrspace(3) global [0 x i8], align 1024
define ptx_kernel void @pipeline(ptr addrspace(1) %w, ptr addrspace(1) %x, ptr addrspace(1) %out, i32 %count) "nvvm.maxntid"="256" {{
entry:
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %base = ptrtoint ptr addrspace(3) @smem to i32
  %zero = icmp eq i32 %t, 0
  br i1 %zero, label %prepare, label %start
prepare:
{inits}
  {_asm("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")}
  br label %start
start:
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  %mine = lshr i32 %t, 7
  %role = call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 -1, i32 %mine, i32 0, i32 31)
  %copies = icmp eq i32 %role, 1
  br i1 %copies, label %producer, label %consumer
producer:
  %elected = icmp eq i32 %t, 128
  br i1 %elected, label %load, label %end
load:
  %i = phi i32 [0, %producer], [%i1, %loaded]
  %ps = and i32 %i, 1
  %pr = lshr i32 %i, 1
  %pr1 = and i32 %pr, 1
  %pp = xor i32 %pr1, 1
  %ps8 = shl i32 %ps, 3
  %pb = add i32 %base, %ps8
  %pempty = add i32 %pb, {EMPTY}
  %pfull = add i32 %pb, {FULL}
{_wait("until_empty", "%pempty", "%pp", "loaded", "load")}
  {_asm(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {STAGE};", "r", "i32 %pfull")}
  %pstage = mul i32 %ps, {STAGE}
  %pa = add i32 %base, %pstage
  %pbb = add i32 %pa, {A_BYTES}
  %wo = mul i32 %i, {A_BYTES}
  %xo = mul i32 %i, {B_BYTES}
  %pw = getelementptr i8, ptr addrspace(1) %w, i32 %wo
  %px = getelementptr i8, ptr addrspace(1) %x, i32 %xo
  {_asm(copy.replace("SIZE", str(A_BYTES)), "r,l,r", "i32 %pa, ptr addrspace(1) %pw, i32 %pfull")}
  {_asm(copy.replace("SIZE", str(B_BYTES)), "r,l,r", "i32 %pbb, ptr addrspace(1) %px, i32 %pfull")}
  %i1 = add i32 %i, 1
  %pmore = icmp ult i32 %i1, %count
  br i1 %pmore, label %load, label %end
consumer:
  br label %multiply
multiply:
  %k = phi i32 [0, %consumer], [%k1, %next]
{phi}
  %cs = and i32 %k, 1
  %cr = lshr i32 %k, 1
  %cp = and i32 %cr, 1
  %cs8 = shl i32 %cs, 3
  %cb = add i32 %base, %cs8
  %cfull = add i32 %cb, {FULL}
  %cempty = add i32 %cb, {EMPTY}
{_wait("until_full", "%cfull", "%cp", "next", "multiply")}
  %cstage = mul i32 %cs, {STAGE}
  %ca = add i32 %base, %cstage
  %cbb = add i32 %ca, {A_BYTES}
  %ca4 = lshr i32 %ca, 4
  %cb4 = lshr i32 %cbb, 4
  %cal = zext i32 %ca4 to i64
  %cbl = zext i32 %cb4 to i64
  %da = or i64 %cal, {1 << 62 | 64 << 32 | 1 << 16}
  %db = or i64 %cbl, {1 << 62 | 64 << 32 | 1 << 16}
  %D = {multiplied}
  {_asm("wgmma.wait_group.sync.aligned 0;")}
{new}
  {_asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", "i32 %cempty")}
  %k1 = add i32 %k, 1
  %more = icmp ult i32 %k1, %count
  br i1 %more, label %multiply, label %write
write:
  %g = lshr i32 %t, 2
  %g7 = and i32 %g, 7
  %wp = lshr i32 %t, 5
  %wp16 = shl i32 %wp, 4
  %row = add i32 %wp16, %g7
  %quad = and i32 %t, 3
  %c128 = shl i32 %quad, 7
  %e = add i32 %row, %c128
  %o = getelementptr float, ptr addrspace(1) %out, i32 %e
{store}
  br label %end
end:
  ret void
}}
"""


# A kernel that doubles 128 numbers in shared memory, copies them to global memory by a bulk copy, and reuses the buffer. Each block has 128
# threads.
COPY_OUT = f"""{HEAD}
@buffer = internal addrspace(3) global [512 x i8] undef, align 128
define ptx_kernel void @copy_out(ptr addrspace(1) %in, ptr addrspace(1) %out) "nvvm.maxntid"="128" {{
entry:
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %base = ptrtoint ptr addrspace(3) @buffer to i32
  %p = getelementptr float, ptr addrspace(1) %in, i32 %t
  %v = load float, ptr addrspace(1) %p
  %d = fadd float %v, %v
  %q = getelementptr float, ptr addrspace(3) @buffer, i32 %t
  store float %d, ptr addrspace(3) %q
  {_asm("fence.proxy.async.shared::cta;")}
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  %one = icmp eq i32 %t, 0
  br i1 %one, label %send, label %after
send:
  {_asm("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], 512;", "l,r", "ptr addrspace(1) %out, i32 %base")}
  {_asm("cp.async.bulk.commit_group;")}
  {_asm("cp.async.bulk.wait_group.read 0;")}
  br label %after
after:
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  store float 0.0, ptr addrspace(3) %q
  ret void
}}
"""
