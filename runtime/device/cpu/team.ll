; A launch list is an array of i64. Per record:
;
;     body, grid                            addresses of the native phase
;     num_buffers, num_dims
;     first, end                            numbers of the ranges of weights that the next product reads first: first .. end - 1
;     (base, slot) per buffer               address = bases[base] + heap[slot]
;     slot per dimension                    value = heap[slot]
;
; Literals are slots too (they are at the end of the heap), so resolving a record takes no branch.
;
; A single thread runs a list with @run_alone. A team runs it with @lead on the calling thread and @help on the helpers. Each thread gets a
; stack, because the system's may be smaller than what kernels need. No thread waits for a helper to arrive: `state` says which chunk of
; which record is next, a thread that claims a chunk runs it, and the thread that finishes the last chunk of a record opens the next one.
; A thread that comes late finds the work done and moves on; a thread that loses its core delays only the chunk that it runs. The result of
; a chunk does not depend on the thread that runs it.
;
; Threads form groups (team.py). There is an array with one %Team per group. Every group uses the fields `state`, 1 and 2 of its own %Team;
; all other fields are used only in the first %Team. Each group has a span of a record's chunks, in proportion to its share of the threads.
; A thread claims chunks of its own group's span first, then of other groups' spans. The first group's span is never empty. When a record is
; opened, the state of the first group is advanced last, so this state tells which record is open.
;
; While a thread waits for others, it prefetches the weights that it will read first in the next product. A list has an array of ranges per
; group, in the order in which the group's thread reads them. Ranges do not depend on results of kernels, so prefetching waits for none.

%Team = type {
  i64, i64, i64, [5 x i64],       ;  0  state: record << 32 | next chunk of the group's span   1  threads in earlier groups   2  threads in earlier groups and this one
  i64, i64, [6 x i64],            ;  4  done: finished chunks of the open record   5  number of groups
  i32, i32, [7 x i64],            ;  7  epoch: odd while a list is open      8  stop
  i32, i32, i32, i32, [6 x i64],  ; 10  active helpers  11  sleepers on state  12  sleepers on epoch   13  leader sleeps on active
  %List, i64, i32, [6 x i64]      ; 15  list   16  number of threads   17  spins before sleeping
}

; words, num_records, bases, heap, most buffers, most dims of a record, ranges, ranges per group
%List = type { ptr, i64, ptr, ptr, i64, i64, ptr, i64 }
%Range = type { ptr, i64 }       ; address, bytes
%Ahead = type { ptr, ptr, i64 }  ; next range to prefetch, end of the ranges, bytes of the next range that were prefetched

declare void @cpu_pause()
declare void @sleep_while(ptr, i32)  ; sleep until woken, if the word still has that value; may return early
declare void @wake(ptr)              ; wake all threads that sleep on the word

; --- stacks ------------------------------------------------------------------------------------------------------------

; Call function(first, second) on the stack that ends at `top`, a multiple of 64. The frame pointer leads back to the caller's stack, also
; for debuggers and profilers.
define internal void @on_stack(ptr %top, ptr %function, ptr %first, ptr %second) noinline nounwind "frame-pointer"="all" {
  %before = call ptr @llvm.stacksave.p0()
  call void @llvm.stackrestore.p0(ptr %top)
  call void %function(ptr %first, ptr %second)
  call void @llvm.stackrestore.p0(ptr %before)
  ret void
}

; The functions that Python calls.
define void @run_alone(ptr %top, ptr %list) {
  call void @on_stack(ptr %top, ptr @run_list, ptr %list, ptr null)
  ret void
}

define void @lead(ptr %top, ptr %team, ptr %list) {
  call void @on_stack(ptr %top, ptr @lead_list, ptr %team, ptr %list)
  ret void
}

define void @help(ptr %top, ptr %team, ptr %group) {
  call void @on_stack(ptr %top, ptr @help_lists, ptr %team, ptr %group)
  ret void
}

; --- resolving a record ------------------------------------------------------------------------------------------------

; Write the addresses of a record's buffers to `buffers`, and the values of its dimensions to `dims`. Return the next record.
define internal ptr @resolve(ptr %record, ptr %bases, ptr %heap, ptr %buffers, ptr %dims) alwaysinline {
entry:
  %num_buffers.p = getelementptr i64, ptr %record, i64 2
  %num_buffers = load i64, ptr %num_buffers.p
  %num_dims.p = getelementptr i64, ptr %record, i64 3
  %num_dims = load i64, ptr %num_dims.p
  %operands = getelementptr i64, ptr %record, i64 6
  br label %buffer

buffer:
  %b = phi i64 [ 0, %entry ], [ %b.next, %buffer.body ]
  %b.more = icmp slt i64 %b, %num_buffers
  br i1 %b.more, label %buffer.body, label %dims.entry

buffer.body:
  %pair = getelementptr [2 x i64], ptr %operands, i64 %b
  %base.index = load i64, ptr %pair
  %base.p = getelementptr i64, ptr %bases, i64 %base.index
  %base = load i64, ptr %base.p
  %slot.p = getelementptr i64, ptr %pair, i64 1
  %slot = load i64, ptr %slot.p
  %offset.p = getelementptr i64, ptr %heap, i64 %slot
  %offset = load i64, ptr %offset.p
  %address = add i64 %base, %offset
  %to = getelementptr i64, ptr %buffers, i64 %b
  store i64 %address, ptr %to
  %b.next = add i64 %b, 1
  br label %buffer

dims.entry:
  %slots = getelementptr [2 x i64], ptr %operands, i64 %num_buffers
  br label %dim

dim:
  %d = phi i64 [ 0, %dims.entry ], [ %d.next, %dim.body ]
  %d.more = icmp slt i64 %d, %num_dims
  br i1 %d.more, label %dim.body, label %exit

dim.body:
  %dim.slot.p = getelementptr i64, ptr %slots, i64 %d
  %dim.slot = load i64, ptr %dim.slot.p
  %value.p = getelementptr i64, ptr %heap, i64 %dim.slot
  %value = load i64, ptr %value.p
  %dim.to = getelementptr i64, ptr %dims, i64 %d
  store i64 %value, ptr %dim.to
  %d.next = add i64 %d, 1
  br label %dim

exit:
  %next = getelementptr i64, ptr %slots, i64 %num_dims
  ret ptr %next
}

; Return the next record.
define internal ptr @skip(ptr %record) alwaysinline {
  %num_buffers.p = getelementptr i64, ptr %record, i64 2
  %num_buffers = load i64, ptr %num_buffers.p
  %num_dims.p = getelementptr i64, ptr %record, i64 3
  %num_dims = load i64, ptr %num_dims.p
  %operands = getelementptr i64, ptr %record, i64 6
  %slots = getelementptr [2 x i64], ptr %operands, i64 %num_buffers
  %next = getelementptr i64, ptr %slots, i64 %num_dims
  ret ptr %next
}

; --- one thread --------------------------------------------------------------------------------------------------------

; Run all records, one after another, each as a single chunk.
define internal void @run_list(ptr %list, ptr %unused) {
entry:
  %words.p = getelementptr %List, ptr %list, i64 0, i32 0
  %words = load ptr, ptr %words.p
  %num_records.p = getelementptr %List, ptr %list, i64 0, i32 1
  %num_records = load i64, ptr %num_records.p
  %bases.p = getelementptr %List, ptr %list, i64 0, i32 2
  %bases = load ptr, ptr %bases.p
  %heap.p = getelementptr %List, ptr %list, i64 0, i32 3
  %heap = load ptr, ptr %heap.p
  %max_buffers.p = getelementptr %List, ptr %list, i64 0, i32 4
  %max_buffers = load i64, ptr %max_buffers.p
  %max_dims.p = getelementptr %List, ptr %list, i64 0, i32 5
  %max_dims = load i64, ptr %max_dims.p
  %buffers = alloca i64, i64 %max_buffers
  %dims = alloca i64, i64 %max_dims
  br label %next

next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %ran ]
  %record = phi ptr [ %words, %entry ], [ %record.next, %ran ]
  %more = icmp slt i64 %i, %num_records
  br i1 %more, label %open, label %exit

open:
  %record.next = call ptr @resolve(ptr %record, ptr %bases, ptr %heap, ptr %buffers, ptr %dims)
  %grid.p = getelementptr i64, ptr %record, i64 1
  %grid = load ptr, ptr %grid.p
  %n = call i64 %grid(ptr %dims)
  %some = icmp sgt i64 %n, 0
  br i1 %some, label %run, label %ran

run:
  %body = load ptr, ptr %record
  call void %body(ptr %buffers, ptr %dims, i64 0, i64 %n)
  br label %ran

ran:
  %i.next = add i64 %i, 1
  br label %next

exit:
  ret void
}

; --- a team ------------------------------------------------------------------------------------------------------------

; Run chunks until the list is done. The leader belongs to the first group.
define internal void @take_part(ptr %team, i1 %leads, i64 %group) {
entry:
  %groups.p = getelementptr %Team, ptr %team, i64 0, i32 5
  %groups = load i64, ptr %groups.p
  %state.p = getelementptr %Team, ptr %team, i64 0, i32 0
  %record.word = getelementptr i32, ptr %state.p, i64 1  ; the upper half: little endian
  %done.p = getelementptr %Team, ptr %team, i64 0, i32 4
  %words.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 0
  %words = load ptr, ptr %words.p
  %num_records.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 1
  %num_records = load i64, ptr %num_records.p
  %bases.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 2
  %bases = load ptr, ptr %bases.p
  %heap.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 3
  %heap = load ptr, ptr %heap.p
  %max_buffers.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 4
  %max_buffers = load i64, ptr %max_buffers.p
  %max_dims.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 5
  %max_dims = load i64, ptr %max_dims.p
  %threads.p = getelementptr %Team, ptr %team, i64 0, i32 16
  %threads = load i64, ptr %threads.p
  %shares = mul i64 %threads, 8  ; approximate number of chunks per record: a thread that loses its core delays only one chunk
  %buffers = alloca i64, i64 %max_buffers
  %dims = alloca i64, i64 %max_dims
  %all.ranges.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 6
  %all.ranges = load ptr, ptr %all.ranges.p
  %num_ranges.p = getelementptr %Team, ptr %team, i64 0, i32 15, i32 7
  %num_ranges = load i64, ptr %num_ranges.p
  %ranges.index = mul i64 %group, %num_ranges
  %ranges = getelementptr %Range, ptr %all.ranges, i64 %ranges.index
  %ahead = alloca %Ahead
  store %Ahead zeroinitializer, ptr %ahead
  br label %look

look:
  ; state of this thread: the open record, its successor, its number of iterations and of chunks
  %at = phi i64 [ -1, %entry ], [ %at.now, %wait ], [ %at.now, %lost ], [ %at.now, %pass ], [ %at.now, %more ]
  %record = phi ptr [ null, %entry ], [ %record.now, %wait ], [ %record.now, %lost ], [ %record.now, %pass ], [ %record.now, %more ]
  %record.next = phi ptr [ %words, %entry ], [ %next.now, %wait ], [ %next.now, %lost ], [ %next.now, %pass ], [ %next.now, %more ]
  %n = phi i64 [ 0, %entry ], [ %n.now, %wait ], [ %n.now, %lost ], [ %n.now, %pass ], [ %n.now, %more ]
  %chunks = phi i64 [ 0, %entry ], [ %chunks.now, %wait ], [ %chunks.now, %lost ], [ %chunks.now, %pass ], [ %chunks.now, %more ]
  %called = phi i1 [ false, %entry ], [ %called.now, %wait ], [ %called.now, %lost ], [ %called.now, %pass ], [ %called.now, %more ]
  %state = load atomic i64, ptr %state.p acquire, align 8
  %open = lshr i64 %state, 32
  %claimed.first = and i64 %state, 4294967295
  %over = icmp eq i64 %open, %num_records
  br i1 %over, label %exit, label %compare

compare:
  %same = icmp eq i64 %open, %at
  br i1 %same, label %ready, label %walk

walk:  ; advance to the open record; other threads ran the records in between
  %w = phi i64 [ %at, %compare ], [ %w.next, %step ]
  %w.record = phi ptr [ %record.next, %compare ], [ %w.record.next, %step ]
  %w.next = add i64 %w, 1
  %arrived = icmp eq i64 %w.next, %open
  br i1 %arrived, label %open.record, label %step

step:
  %w.record.next = call ptr @skip(ptr %w.record)
  br label %walk

open.record:
  %resolved = call ptr @resolve(ptr %w.record, ptr %bases, ptr %heap, ptr %buffers, ptr %dims)
  %grid.p = getelementptr i64, ptr %w.record, i64 1
  %grid = load ptr, ptr %grid.p
  %n.counted = call i64 %grid(ptr %dims)
  %n.new = call i64 @llvm.smax.i64(i64 %n.counted, i64 0)
  %share = udiv i64 %n.new, %shares
  %size = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %chunks.new = udiv i64 %n.new, %size
  %several = icmp ugt i64 %chunks.new, 1
  %uncalled = xor i1 %called, true
  %call.leads = and i1 %leads, %uncalled
  %call.now = and i1 %several, %call.leads
  br i1 %call.now, label %call.helpers, label %ready

call.helpers:  ; wake helpers at the first record with several chunks, so that a list of small records wakes no thread
  %idle.p = getelementptr %Team, ptr %team, i64 0, i32 12
  %epoch.p = getelementptr %Team, ptr %team, i64 0, i32 7
  call void @wake_sleepers(ptr %idle.p, ptr %epoch.p)
  br label %ready

ready:
  %at.now = phi i64 [ %at, %compare ], [ %open, %open.record ], [ %open, %call.helpers ]
  %record.now = phi ptr [ %record, %compare ], [ %w.record, %open.record ], [ %w.record, %call.helpers ]
  %next.now = phi ptr [ %record.next, %compare ], [ %resolved, %open.record ], [ %resolved, %call.helpers ]
  %n.now = phi i64 [ %n, %compare ], [ %n.new, %open.record ], [ %n.new, %call.helpers ]
  %chunks.now = phi i64 [ %chunks, %compare ], [ %chunks.new, %open.record ], [ %chunks.new, %call.helpers ]
  %called.now = phi i1 [ %called, %compare ], [ %called, %open.record ], [ true, %call.helpers ]
  br label %group.look

group.look:  ; claim a chunk of this group's span, or else of the next group's; the record stays open until this thread has counted its chunks as done
  %tried = phi i64 [ 0, %ready ], [ %tried.next, %group.next ], [ 0, %run ], [ 0, %lost.untold ]
  %k = phi i64 [ %group, %ready ], [ %k.wrapped, %group.next ], [ %group, %run ], [ %group, %lost.untold ]
  %untold = phi i64 [ 0, %ready ], [ %untold, %group.next ], [ %untold.next, %run ], [ %untold, %lost.untold ]
  %span.p = getelementptr %Team, ptr %team, i64 %k, i32 0
  %before.p = getelementptr %Team, ptr %team, i64 %k, i32 1
  %through.p = getelementptr %Team, ptr %team, i64 %k, i32 2
  %before = load i64, ptr %before.p
  %through = load i64, ptr %through.p
  %span.begin = call i64 @first_chunk(i64 %chunks.now, i64 %before, i64 %threads)
  %span.end = call i64 @first_chunk(i64 %chunks.now, i64 %through, i64 %threads)
  %span = load atomic i64, ptr %span.p acquire, align 8
  %span.record = lshr i64 %span, 32
  %span.open = icmp eq i64 %span.record, %open  ; false: the span is at a later record, and all of this record is done
  %claimed.before = and i64 %span, 4294967295
  %chunk = add i64 %span.begin, %claimed.before
  %span.left = icmp ult i64 %chunk, %span.end
  %left = and i1 %span.open, %span.left
  br i1 %left, label %claim, label %group.next

group.next:
  %tried.next = add i64 %tried, 1
  %k.next = add i64 %k, 1
  %k.last = icmp eq i64 %k.next, %groups
  %k.wrapped = select i1 %k.last, i64 0, i64 %k.next
  %tried.all = icmp eq i64 %tried.next, %groups
  br i1 %tried.all, label %none.left, label %group.look

none.left:
  %ran = icmp ne i64 %untold, 0
  br i1 %ran, label %tell, label %none.ran

tell:  ; count chunks as done once per record, not per chunk: between cores that share no cache, each update takes as long as a memory access
  ; On x86-64 this is a locked instruction. It also orders the non-temporal stores of kernels, which a plain release store would not.
  %done.before = atomicrmw add ptr %done.p, i64 %untold acq_rel
  %done = add i64 %done.before, %untold
  %complete = icmp eq i64 %done, %chunks.now
  br i1 %complete, label %advance, label %wait

none.ran:
  %empty = icmp eq i64 %chunks.now, 0
  %unpassed = icmp eq i64 %claimed.first, 0
  %pass.now = and i1 %empty, %unpassed
  br i1 %pass.now, label %pass, label %wait

pass:  ; the record has no chunks: the thread that wins this exchange opens the next record
  %passing.state = add i64 %state, 1
  %passing = cmpxchg ptr %state.p, i64 %state, i64 %passing.state acq_rel acquire
  %passes = extractvalue { i64, i1 } %passing, 1
  br i1 %passes, label %advance, label %look

wait:
  call void @look_ahead(ptr %ahead, ptr %record.now, ptr %ranges)
  %open.32 = trunc i64 %open to i32
  %sleepers.p = getelementptr %Team, ptr %team, i64 0, i32 11
  call void @wait_while(ptr %team, ptr %record.word, i32 %open.32, ptr %sleepers.p, ptr %ahead)
  br label %look

claim:
  %claimed.state = add i64 %span, 1
  %claimed = cmpxchg ptr %span.p, i64 %span, i64 %claimed.state acq_rel acquire
  %won = extractvalue { i64, i1 } %claimed, 1
  br i1 %won, label %run, label %lost

lost:
  %lost.some = icmp ne i64 %untold, 0
  br i1 %lost.some, label %lost.untold, label %look

lost.untold:
  br label %group.look

run:
  %span.count = sub i64 %span.end, %span.begin
  %through.span = call i64 @split(i64 %n.now, i64 %span.end, i64 %chunks.now)
  %before.span = call i64 @split(i64 %n.now, i64 %span.begin, i64 %chunks.now)
  %span.n = sub i64 %through.span, %before.span
  %rest = sub i64 %span.end, %chunk
  %rest.next = sub i64 %rest, 1
  %rest.n = call i64 @last_chunks(i64 %span.n, i64 %rest, i64 %span.count)
  %rest.next.n = call i64 @last_chunks(i64 %span.n, i64 %rest.next, i64 %span.count)
  %begin = sub i64 %through.span, %rest.n
  %end = sub i64 %through.span, %rest.next.n
  %body = load ptr, ptr %record.now
  call void %body(ptr %buffers, ptr %dims, i64 %begin, i64 %end)
  %untold.next = add i64 %untold, 1
  br label %group.look

advance:  ; no other thread writes the states of a record whose chunks are all claimed
  store atomic i64 0, ptr %done.p monotonic, align 8
  %following = add i64 %open, 1
  %following.state = shl i64 %following, 32
  br label %advance.group

advance.group:  ; from the last group to the first
  %a = phi i64 [ %groups, %advance ], [ %a.next, %advance.group ]
  %a.next = sub i64 %a, 1
  %advanced.p = getelementptr %Team, ptr %team, i64 %a.next, i32 0
  store atomic i64 %following.state, ptr %advanced.p seq_cst, align 8
  %advanced.all = icmp eq i64 %a.next, 0
  br i1 %advanced.all, label %opened, label %advance.group

opened:
  %waiting.p = getelementptr %Team, ptr %team, i64 0, i32 11
  call void @wake_sleepers(ptr %waiting.p, ptr %record.word)
  br label %more

more:
  br label %look

exit:
  ret void
}

; Return the first chunk of the span that follows the spans of %threads.before threads. It is rounded up, so that the first span has a chunk
; if there is any.
define internal i64 @first_chunk(i64 %chunks, i64 %threads.before, i64 %threads) alwaysinline {
  %scaled = mul i64 %chunks, %threads.before
  %more = add i64 %scaled, %threads
  %rounding = sub i64 %more, 1
  %first = udiv i64 %rounding, %threads
  ret i64 %first
}

; Return the first iteration of the span that begins with this chunk. Spans with equally many chunks differ by at most one iteration.
define internal i64 @split(i64 %n, i64 %chunk, i64 %chunks) alwaysinline {
  %scaled = mul i64 %n, %chunk
  %begin = udiv i64 %scaled, %chunks
  ret i64 %begin
}

; Return the number of iterations in the last `rest` of a span's `count` chunks. The span has n iterations. The lengths of its chunks fall
; linearly, down to a single iteration: the last chunks are short, so that threads finish almost together.
define internal i64 @last_chunks(i64 %n, i64 %rest, i64 %count) alwaysinline {
  %more = sub i64 %n, %count
  %rest.more = add i64 %rest, 1
  %part = mul i64 %rest, %rest.more
  %count.more = add i64 %count, 1
  %whole = mul i64 %count, %count.more
  %scaled = mul i64 %more, %part
  %falling = udiv i64 %scaled, %whole
  %result = add i64 %rest, %falling
  ret i64 %result
}

; Open the list to the helpers, run chunks with them, close the list, and wait until the last helper has left it.
define internal void @lead_list(ptr %team, ptr %list) {
entry:
  %list.p = getelementptr %Team, ptr %team, i64 0, i32 15
  call void @llvm.memcpy.p0.p0.i64(ptr %list.p, ptr %list, i64 64, i1 false)
  %groups.p = getelementptr %Team, ptr %team, i64 0, i32 5
  %groups = load i64, ptr %groups.p
  br label %reset

reset:
  %n = phi i64 [ 0, %entry ], [ %n.next, %reset ]
  %reset.p = getelementptr %Team, ptr %team, i64 %n, i32 0
  store atomic i64 0, ptr %reset.p monotonic, align 8
  %n.next = add i64 %n, 1
  %reset.more = icmp ult i64 %n.next, %groups
  br i1 %reset.more, label %reset, label %ready

ready:
  %epoch.p = getelementptr %Team, ptr %team, i64 0, i32 7
  %open = atomicrmw add ptr %epoch.p, i32 1 seq_cst
  call void @take_part(ptr %team, i1 true, i64 0)
  %close = atomicrmw add ptr %epoch.p, i32 1 seq_cst
  %active.p = getelementptr %Team, ptr %team, i64 0, i32 10
  %asleep.p = getelementptr %Team, ptr %team, i64 0, i32 13
  br label %look

look:
  %active = load atomic i32, ptr %active.p seq_cst, align 4
  %alone = icmp eq i32 %active, 0
  br i1 %alone, label %exit, label %wait

wait:
  call void @wait_while(ptr %team, ptr %active.p, i32 %active, ptr %asleep.p, ptr null)
  br label %look

exit:
  ret void
}

; Run lists as a helper until the team stops. A helper counts itself active before it checks whether a list is open, and the leader closes the
; list before it checks the count, so at least one of them sees the other.
define internal void @help_lists(ptr %team, ptr %group.word) {
entry:
  %group = ptrtoint ptr %group.word to i64
  %epoch.p = getelementptr %Team, ptr %team, i64 0, i32 7
  %stop.p = getelementptr %Team, ptr %team, i64 0, i32 8
  %active.p = getelementptr %Team, ptr %team, i64 0, i32 10
  %idle.p = getelementptr %Team, ptr %team, i64 0, i32 12
  %leader.p = getelementptr %Team, ptr %team, i64 0, i32 13
  br label %idle

idle:
  %seen = phi i32 [ 0, %entry ], [ %epoch, %leave ]
  call void @wait_while(ptr %team, ptr %epoch.p, i32 %seen, ptr %idle.p, ptr null)
  %stop = load atomic i32, ptr %stop.p seq_cst, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %exit, label %enter

enter:
  %others = atomicrmw add ptr %active.p, i32 1 seq_cst
  %epoch = load atomic i32, ptr %epoch.p seq_cst, align 4
  %open = trunc i32 %epoch to i1
  br i1 %open, label %work, label %leave

work:
  call void @take_part(ptr %team, i1 false, i64 %group)
  br label %leave

leave:
  %left = atomicrmw sub ptr %active.p, i32 1 seq_cst
  call void @wake_sleepers(ptr %leader.p, ptr %active.p)
  br label %idle

exit:
  ret void
}

; Tell the helpers to end. No list may be open.
define void @stop(ptr %team) {
  %stop.p = getelementptr %Team, ptr %team, i64 0, i32 8
  store atomic i32 1, ptr %stop.p seq_cst, align 4
  %epoch.p = getelementptr %Team, ptr %team, i64 0, i32 7
  %closed = atomicrmw add ptr %epoch.p, i32 2 seq_cst  ; stays even: no list is open
  call void @wake(ptr %epoch.p)
  ret void
}

; --- waiting -----------------------------------------------------------------------------------------------------------

; Return soon after the word changes: spin for a while, then sleep. While spinning, prefetch `ahead`, if it is not null. A sleeper counts
; itself before it checks the word for the last time, and a thread that changes the word checks the count afterwards.
define internal void @wait_while(ptr %team, ptr %word, i32 %value, ptr %sleepers, ptr %ahead) {
entry:
  %spins.p = getelementptr %Team, ptr %team, i64 0, i32 17
  %spins = load i32, ptr %spins.p
  br label %spin

spin:
  %i = phi i32 [ 0, %entry ], [ %i.next, %again ]
  %now = load atomic i32, ptr %word acquire, align 4
  %changed = icmp ne i32 %now, %value
  br i1 %changed, label %exit, label %again

again:
  call void @prefetch_or_pause(ptr %ahead)
  %i.next = add i32 %i, 1
  %patient = icmp ult i32 %i.next, %spins
  br i1 %patient, label %spin, label %sleep

sleep:
  %before = atomicrmw add ptr %sleepers, i32 1 seq_cst
  call void @sleep_while(ptr %word, i32 %value)
  %after = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  %woken = load atomic i32, ptr %word acquire, align 4
  %early = icmp eq i32 %woken, %value
  br i1 %early, label %sleep, label %exit

exit:
  ret void
}

; Let `ahead` begin with a record's ranges, unless it has already passed their beginning.
define internal void @look_ahead(ptr %ahead, ptr %record, ptr %ranges) alwaysinline {
entry:
  %first.p = getelementptr i64, ptr %record, i64 4
  %first.index = load i64, ptr %first.p
  %first = getelementptr %Range, ptr %ranges, i64 %first.index
  %end.index.p = getelementptr i64, ptr %record, i64 5
  %end.index = load i64, ptr %end.index.p
  %end = getelementptr %Range, ptr %ranges, i64 %end.index
  %end.p = getelementptr %Ahead, ptr %ahead, i64 0, i32 1
  store ptr %end, ptr %end.p
  %next = load ptr, ptr %ahead
  %passed = icmp uge ptr %next, %first
  br i1 %passed, label %exit, label %begin

begin:
  store ptr %first, ptr %ahead
  %bytes.p = getelementptr %Ahead, ptr %ahead, i64 0, i32 2
  store i64 0, ptr %bytes.p
  br label %exit

exit:
  ret void
}

; Prefetch a few lines. If none is left, pause.
define internal void @prefetch_or_pause(ptr %ahead) alwaysinline {
entry:
  %none = icmp eq ptr %ahead, null
  br i1 %none, label %pause, label %look

look:
  %range = load ptr, ptr %ahead
  %end.p = getelementptr %Ahead, ptr %ahead, i64 0, i32 1
  %end = load ptr, ptr %end.p
  %more = icmp ult ptr %range, %end
  br i1 %more, label %prefetch, label %pause

prefetch:
  %bytes.p = getelementptr %Ahead, ptr %ahead, i64 0, i32 2
  %bytes = load i64, ptr %bytes.p
  %address = load ptr, ptr %range
  %place = getelementptr i8, ptr %address, i64 %bytes
  br label %line

line:
  %at = phi i64 [ 0, %prefetch ], [ %at.next, %line ]
  %line.p = getelementptr i8, ptr %place, i64 %at
  call void @llvm.prefetch.p0(ptr %line.p, i32 0, i32 2, i32 1)  ; read data into all caches except L1
  %at.next = add i64 %at, 64
  %line.more = icmp ult i64 %at.next, 512
  br i1 %line.more, label %line, label %count

count:
  %bytes.next = add i64 %bytes, 512
  %size.p = getelementptr %Range, ptr %range, i64 0, i32 1
  %size = load i64, ptr %size.p
  %size.more = icmp ult i64 %bytes.next, %size
  %range.next = getelementptr %Range, ptr %range, i64 1
  %range.now = select i1 %size.more, ptr %range, ptr %range.next
  %bytes.now = select i1 %size.more, i64 %bytes.next, i64 0
  store ptr %range.now, ptr %ahead
  store i64 %bytes.now, ptr %bytes.p
  br label %exit

pause:
  call void @cpu_pause()
  br label %exit

exit:
  ret void
}

; Wake the threads that sleep on a word, if the count of its sleepers is not zero.
define internal void @wake_sleepers(ptr %sleepers, ptr %word) {
entry:
  %count = load atomic i32, ptr %sleepers seq_cst, align 4
  %any = icmp ne i32 %count, 0
  br i1 %any, label %wake, label %exit

wake:
  call void @wake(ptr %word)
  br label %exit

exit:
  ret void
}

; Pause a number of times, so that team.py can measure how long a pause takes.
define void @spin(i32 %times) {
entry:
  br label %again

again:
  %i = phi i32 [ 0, %entry ], [ %i.next, %again ]
  call void @cpu_pause()
  %i.next = add i32 %i, 1
  %more = icmp ult i32 %i.next, %times
  br i1 %more, label %again, label %exit

exit:
  ret void
}

declare ptr @llvm.stacksave.p0()
declare void @llvm.stackrestore.p0(ptr)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
