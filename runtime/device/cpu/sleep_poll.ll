; Systems other than Linux: poll every half millisecond. This costs little CPU time, and no wake-up can be lost.

declare i32 @usleep(i32)

define void @sleep_while(ptr %word, i32 %value) {
  %ignored = call i32 @usleep(i32 500)
  ret void
}

define void @wake(ptr %word) {
  ret void
}
