; Compare arrays with the layouts of an earlier call, and take their addresses. `plan` (layouts.py) is an array of i64:
;
;     count, type                     number of arrays, the class of all of them
;     base, offset, bytes             where the result is
;     result, object per array        addresses of the Python objects: array that receives a copy of the result, or 0; arrays
;     base, dtype, rank, extents      per array: its base, its layout
;
; @HEAD@ is the size of PyObject. NumPy's fields follow it in an order that is part of NumPy's binary interface (PyArrayObject_fields).

%Array = type { ptr, i32, ptr, ptr, ptr, ptr, i32 }  ; data, rank, extents, strides, base, dtype, flags

; Store the address of each array at its base. Return false if an array has another layout than `plan` states.
define internal i1 @place(ptr %plan, ptr %bases) {
entry:
  %count = load i64, ptr %plan
  %type.p = getelementptr i64, ptr %plan, i64 1
  %type = load ptr, ptr %type.p
  %objects = getelementptr i64, ptr %plan, i64 6
  %first = getelementptr i64, ptr %objects, i64 %count
  br label %next

next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %placed ]
  %at = phi ptr [ %first, %entry ], [ %at.next, %placed ]
  %end = icmp eq i64 %i, %count
  br i1 %end, label %same, label %array

array:
  %object.p = getelementptr ptr, ptr %objects, i64 %i
  %object = load ptr, ptr %object.p
  %fields = getelementptr i8, ptr %object, i64 @HEAD@
  %own_type.p = getelementptr i8, ptr %fields, i64 -8  ; the last field of PyObject
  %own_type = load ptr, ptr %own_type.p
  %is_array = icmp eq ptr %own_type, %type
  br i1 %is_array, label %layout, label %other

layout:
  %dtype.p = getelementptr %Array, ptr %fields, i64 0, i32 5
  %dtype = load ptr, ptr %dtype.p
  %dtype.w = getelementptr i64, ptr %at, i64 1
  %dtype.wanted = load ptr, ptr %dtype.w
  %same_dtype = icmp eq ptr %dtype, %dtype.wanted
  %rank.p = getelementptr %Array, ptr %fields, i64 0, i32 1
  %rank.short = load i32, ptr %rank.p
  %rank = zext i32 %rank.short to i64
  %rank.w = getelementptr i64, ptr %at, i64 2
  %rank.wanted = load i64, ptr %rank.w
  %same_rank = icmp eq i64 %rank, %rank.wanted
  %flags.p = getelementptr %Array, ptr %fields, i64 0, i32 6
  %flags = load i32, ptr %flags.p
  %compact = and i32 %flags, 257  ; NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED
  %is_compact = icmp eq i32 %compact, 257
  %a = and i1 %same_dtype, %same_rank
  %b = and i1 %a, %is_compact
  %extents.p = getelementptr %Array, ptr %fields, i64 0, i32 2
  %extents = load ptr, ptr %extents.p
  %extents.w = getelementptr i64, ptr %at, i64 3
  br i1 %b, label %axis, label %other

axis:
  %d = phi i64 [ 0, %layout ], [ %d.next, %extent ]
  %last = icmp eq i64 %d, %rank
  br i1 %last, label %placed, label %extent

extent:
  %n.p = getelementptr i64, ptr %extents, i64 %d
  %n = load i64, ptr %n.p
  %wanted.p = getelementptr i64, ptr %extents.w, i64 %d
  %wanted = load i64, ptr %wanted.p
  %same_extent = icmp eq i64 %n, %wanted
  %d.next = add i64 %d, 1
  br i1 %same_extent, label %axis, label %other

placed:
  %data = load ptr, ptr %fields
  %base = load i64, ptr %at
  %place.p = getelementptr ptr, ptr %bases, i64 %base
  store ptr %data, ptr %place.p
  %i.next = add i64 %i, 1
  %at.next = getelementptr i64, ptr %extents.w, i64 %rank
  br label %next

same:
  ret i1 true

other:
  ret i1 false
}

; Copy the result into the array that receives it, if there is one.
define internal void @copy_result(ptr %plan, ptr %bases) {
entry:
  %result.p = getelementptr i64, ptr %plan, i64 5
  %result = load ptr, ptr %result.p
  %none = icmp eq ptr %result, null
  br i1 %none, label %done, label %copy
copy:
  %data.p = getelementptr i8, ptr %result, i64 @HEAD@
  %data = load ptr, ptr %data.p
  %number.p = getelementptr i64, ptr %plan, i64 2
  %number = load i64, ptr %number.p
  %base.p = getelementptr ptr, ptr %bases, i64 %number
  %base = load ptr, ptr %base.p
  %offset.p = getelementptr i64, ptr %plan, i64 3
  %offset = load i64, ptr %offset.p
  %source = getelementptr i8, ptr %base, i64 %offset
  %bytes.p = getelementptr i64, ptr %plan, i64 4
  %bytes = load i64, ptr %bytes.p
  call void @llvm.memcpy.p0.p0.i64(ptr %data, ptr %source, i64 %bytes, i1 false)
  br label %done
done:
  ret void
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @run_alone(ptr, ptr)
declare void @lead(ptr, ptr, ptr)

; Place the arrays and run the list. Return 0, and run nothing, if an array has another layout.
define i32 @repeat_alone(ptr %top, ptr %list, ptr %bases, ptr %plan) {
  %same = call i1 @place(ptr %plan, ptr %bases)
  br i1 %same, label %run, label %other
run:
  call void @run_alone(ptr %top, ptr %list)
  call void @copy_result(ptr %plan, ptr %bases)
  ret i32 1
other:
  ret i32 0
}

; The same on all threads of a team, whose leader is the calling thread.
define i32 @repeat_lead(ptr %top, ptr %team, ptr %list, ptr %bases, ptr %plan) {
  %same = call i1 @place(ptr %plan, ptr %bases)
  br i1 %same, label %run, label %other
run:
  call void @lead(ptr %top, ptr %team, ptr %list)
  call void @copy_result(ptr %plan, ptr %bases)
  ret i32 1
other:
  ret i32 0
}
