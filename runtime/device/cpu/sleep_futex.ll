; Linux: sleep in the kernel. @FUTEX@ is the number of the system call, which differs by machine.

declare i64 @syscall(i64, ...)

define void @sleep_while(ptr %word, i32 %value) {
  %expected = zext i32 %value to i64
  ; FUTEX_WAIT_PRIVATE, without a timeout
  %ignored = call i64 (i64, ...) @syscall(i64 @FUTEX@, ptr %word, i64 128, i64 %expected, ptr null)
  ret void
}

define void @wake(ptr %word) {
  ; FUTEX_WAKE_PRIVATE, all sleepers
  %ignored = call i64 (i64, ...) @syscall(i64 @FUTEX@, ptr %word, i64 129, i64 2147483647)
  ret void
}
