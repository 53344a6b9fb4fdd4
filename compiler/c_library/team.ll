; Run kernels on several threads of the caller, in the way of runtime/web/team.mjs. A kernel's iterations are cut into chunks, and a free thread
; claims the next chunk. The result of a chunk does not depend on the thread that runs it.
;
; A thread claims a chunk by incrementing `state`, whose upper half is the number of the record, so a helper that comes late cannot claim a
; chunk of a record that has ended. While the leader writes the fields of a record, its chunk number is the largest one, which no record has.

%Team = type {
  i64, i64, i64, ptr, ptr, ptr, [2 x i64],  ; 0  state: record << 32 | next chunk   1  chunks   2  iterations   3  body   4  buffers   5  dims
  i32, i32, i64, [6 x i64]                  ; 7  finished chunks   8  stop   9  threads
}

declare void @cpu_pause()

; Run all iterations of a kernel, and return when they have ended. One thread runs them if the team has no other, or if there is one iteration.
define internal void @run_together(ptr %team, ptr %body, ptr %buffers, ptr %dims, i64 %n) #0 {
entry:
  %threads.p = getelementptr %Team, ptr %team, i64 0, i32 9
  %threads = load i64, ptr %threads.p
  %shares = mul i64 %threads, 8  ; chunks per record: a thread that loses its core delays only one of them
  %chunks = call i64 @llvm.umin.i64(i64 %shares, i64 %n)
  %alone = icmp eq i64 %threads, 1
  %single = icmp ule i64 %chunks, 1
  %whole = or i1 %alone, %single
  br i1 %whole, label %run, label %open

run:
  call void %body(ptr %buffers, ptr %dims, i64 0, i64 %n)
  ret void

open:
  %before = load atomic i64, ptr %team monotonic, align 8
  %record.before = lshr i64 %before, 32
  %record = add i64 %record.before, 1
  %opened = shl i64 %record, 32
  %closed = or i64 %opened, 4294967295
  store atomic i64 %closed, ptr %team seq_cst, align 8
  %chunks.p = getelementptr %Team, ptr %team, i64 0, i32 1
  %n.p = getelementptr %Team, ptr %team, i64 0, i32 2
  %body.p = getelementptr %Team, ptr %team, i64 0, i32 3
  %buffers.p = getelementptr %Team, ptr %team, i64 0, i32 4
  %dims.p = getelementptr %Team, ptr %team, i64 0, i32 5
  %finished.p = getelementptr %Team, ptr %team, i64 0, i32 7
  store atomic i64 %chunks, ptr %chunks.p seq_cst, align 8
  store atomic i64 %n, ptr %n.p seq_cst, align 8
  store atomic ptr %body, ptr %body.p seq_cst, align 8
  store atomic ptr %buffers, ptr %buffers.p seq_cst, align 8
  store atomic ptr %dims, ptr %dims.p seq_cst, align 8
  store atomic i32 0, ptr %finished.p seq_cst, align 4
  store atomic i64 %opened, ptr %team seq_cst, align 8
  call void @take_part(ptr %team)
  %chunks.32 = trunc i64 %chunks to i32
  br label %look

look:
  %finished = load atomic i32, ptr %finished.p seq_cst, align 4
  %over = icmp eq i32 %finished, %chunks.32
  br i1 %over, label %exit, label %wait

wait:  ; all chunks are claimed, and other threads still run some
  call void @cpu_pause()
  br label %look

exit:
  ret void
}

; Run chunks of the open record until none is left to claim, and then count them as finished.
define internal void @take_part(ptr %team) #0 {
entry:
  %chunks.p = getelementptr %Team, ptr %team, i64 0, i32 1
  %n.p = getelementptr %Team, ptr %team, i64 0, i32 2
  %body.p = getelementptr %Team, ptr %team, i64 0, i32 3
  %buffers.p = getelementptr %Team, ptr %team, i64 0, i32 4
  %dims.p = getelementptr %Team, ptr %team, i64 0, i32 5
  br label %look

look:
  %done = phi i32 [ 0, %entry ], [ %done, %claim ], [ %done.next, %run ]
  %state = load atomic i64, ptr %team seq_cst, align 8
  %chunk = and i64 %state, 4294967295
  %chunks = load atomic i64, ptr %chunks.p seq_cst, align 8
  %n = load atomic i64, ptr %n.p seq_cst, align 8
  %body = load atomic ptr, ptr %body.p seq_cst, align 8
  %buffers = load atomic ptr, ptr %buffers.p seq_cst, align 8
  %dims = load atomic ptr, ptr %dims.p seq_cst, align 8
  %left = icmp ult i64 %chunk, %chunks
  br i1 %left, label %claim, label %none

claim:  ; if this succeeds, the state has not changed since, so the fields are those of the claimed record
  %state.next = add i64 %state, 1
  %claimed = cmpxchg ptr %team, i64 %state, i64 %state.next seq_cst seq_cst, align 8
  %won = extractvalue { i64, i1 } %claimed, 1
  br i1 %won, label %run, label %look

run:
  %begin.scaled = mul i64 %n, %chunk
  %begin = udiv i64 %begin.scaled, %chunks
  %end.scaled = add i64 %begin.scaled, %n
  %end = udiv i64 %end.scaled, %chunks
  call void %body(ptr %buffers, ptr %dims, i64 %begin, i64 %end)
  %done.next = add i32 %done, 1
  br label %look

none:
  %some = icmp ne i32 %done, 0
  br i1 %some, label %tell, label %exit

tell:  ; on x86-64 this is a locked instruction, which also orders the non-temporal stores of kernels
  %finished.p = getelementptr %Team, ptr %team, i64 0, i32 7
  %before = atomicrmw add ptr %finished.p, i32 %done seq_cst, align 4
  br label %exit

exit:
  ret void
}

; Run chunks of open records until no record was opened for a while, or until the team stops. Return 0 if it stops, otherwise 1.
define internal i32 @help_team(ptr %team) #0 {
entry:
  %stop.p = getelementptr %Team, ptr %team, i64 0, i32 8
  br label %look

look:
  %state = load atomic i64, ptr %team seq_cst, align 8
  call void @take_part(ptr %team)
  br label %spin

spin:
  %i = phi i32 [ 0, %look ], [ %i.next, %again ]
  %stop = load atomic i32, ptr %stop.p seq_cst, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %exit, label %watch

watch:
  %now = load atomic i64, ptr %team seq_cst, align 8
  %changed = icmp ne i64 %now, %state
  br i1 %changed, label %look, label %again

again:
  call void @cpu_pause()
  %i.next = add i32 %i, 1
  %patient = icmp ult i32 %i.next, 2000
  br i1 %patient, label %spin, label %exit

exit:
  %goes.on = phi i32 [ 0, %spin ], [ 1, %again ]
  ret i32 %goes.on
}

; Make all helpers return 0.
define internal void @stop_team(ptr %team) #0 {
  %stop.p = getelementptr %Team, ptr %team, i64 0, i32 8
  store atomic i32 1, ptr %stop.p seq_cst, align 4
  ret void
}
