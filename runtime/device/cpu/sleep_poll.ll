; Elsewhere: look again every half millisecond. Costs a little, loses nothing.

declare i32 @usleep(i32)

define void @sleep_while(ptr %word, i32 %value) {
  %ignored = call i32 @usleep(i32 500)
  ret void
}

define void @wake(ptr %word) {
  ret void
}
