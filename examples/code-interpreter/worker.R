# Runs pieces of R for worker.py, which describes requests and answers.

.thaw <- new.env()

local({
  descriptors <- commandArgs(trailingOnly = TRUE)
  .thaw$requests <- file(paste0("/dev/fd/", descriptors[1]), "rb", raw = TRUE)
  .thaw$answers <- file(paste0("/dev/fd/", descriptors[2]), "wb", raw = TRUE)
})

.thaw$answer <- function(...) {
  writeBin(enc2utf8(c(...)), .thaw$answers)
  flush(.thaw$answers)
}

.thaw$read <- function() {
  field <- readBin(.thaw$requests, "character", 1)
  # Nobody asks any more.
  if (length(field) == 0) quit(save = "no")
  Encoding(field) <- "UTF-8"
  field
}

.thaw$read_changes <- function() {
  count <- as.integer(.thaw$read())
  vapply(seq_len(count), function(i) .thaw$read(), "")
}

# Applies changes of variables; those that undo them.
.thaw$change <- function(changes) {
  vapply(changes, USE.NAMES = FALSE, FUN.VALUE = "", function(change) {
    name <- sub("=.*", "", change)
    before <- Sys.getenv(name, unset = NA)
    if (name == change) {
      Sys.unsetenv(name)
    } else {
      do.call(Sys.setenv, setNames(list(substring(change, nchar(name) + 2)), name))
    }
    if (is.na(before)) name else paste0(name, "=", before)
  })
}

# Runs code as one types it: a value that is visible is a result.
.thaw$run <- function(code) {
  for (expression in parse(text = code, keep.source = FALSE)) {
    value <- withVisible(eval(expression, globalenv()))
    if (value$visible) .thaw$answer("result", .thaw$shown(value$value))
  }
}

.thaw$shown <- function(value) paste(capture.output(print(value)), collapse = "\n")

.thaw$answer_error <- function(condition, calls) {
  value <- conditionMessage(condition)
  call <- conditionCall(condition)
  first <- if (is.null(call)) "Error" else paste("Error in", deparse(call)[1])
  lines <- c(paste0(first, ": ", value), .thaw$traceback(calls))
  .thaw$answer("error", class(condition)[1], value, paste(lines, collapse = "\n"))
}

# The calls of the code, without those around it.
.thaw$traceback <- function(calls) {
  texts <- vapply(calls, function(call) deparse(call)[1], "")
  begin <- which(texts == "eval(expression, globalenv())")
  own <- if (length(begin)) tail(texts, -(begin[1] + 1)) else character()
  head(own, -2)
}

.thaw$execute <- function(code) {
  calls <- list()
  tryCatch(
    withCallingHandlers(.thaw$run(code), error = function(condition) calls <<- sys.calls()),
    error = function(condition) .thaw$answer_error(condition, calls),
    interrupt = function(condition) {
      .thaw$answer("error", "Interrupt", "the code was interrupted", "")
    }
  )
}

repeat {
  stay <- .thaw$read_changes()
  lent <- .thaw$read_changes()
  code <- .thaw$read()
  .thaw$change(stay)
  before <- .thaw$change(lent)
  .thaw$execute(code)
  .thaw$change(before)
  flush(stdout())
  .thaw$answer("done")
}
