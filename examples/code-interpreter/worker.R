# Runs pieces of R for worker.py, which describes requests and answers.

# All names here are none of the code's, and the code's are none of these.
local(envir = new.env(parent = baseenv()), {
  descriptors <- commandArgs(trailingOnly = TRUE)
  requests <- file(paste0("/dev/fd/", descriptors[1]), "rb", raw = TRUE)
  answers <- file(paste0("/dev/fd/", descriptors[2]), "wb", raw = TRUE)

  # Each field is one text, whatever it was.
  answer <- function(...) {
    fields <- vapply(list(...), function(field) paste(field, collapse = "\n"), "")
    writeBin(enc2utf8(fields), answers)
    flush(answers)
  }

  # The fields of a request.
  read <- function() {
    bytes <- readBin(requests, "character", 1)
    # Nobody asks any more.
    if (length(bytes) == 0) quit(save = "no")
    request <- readBin(requests, "raw", as.integer(bytes))
    ends <- which(request == 0)
    begins <- c(1, ends[-length(ends)] + 1)
    fields <- mapply(function(begin, end) rawToChar(request[seq_len(end - begin) + begin - 1]), begins, ends)
    Encoding(fields) <- "UTF-8"
    fields
  }

  # Applies changes of variables; those that undo them.
  change <- function(changes) {
    vapply(changes, USE.NAMES = FALSE, FUN.VALUE = "", function(change) {
      name <- sub("=.*", "", change)
      before <- Sys.getenv(name, unset = NA)
      if (name == change) {
        Sys.unsetenv(name)
      } else {
        value <- list(substring(change, nchar(name) + 2))
        names(value) <- name
        do.call(Sys.setenv, value)
      }
      if (is.na(before)) name else paste0(name, "=", before)
    })
  }

  # Runs code as one types it: a value that is visible is a result.
  run <- function(code) {
    for (expression in parse(text = code, keep.source = FALSE)) {
      value <- withVisible(eval(expression, globalenv()))
      if (value$visible) answer("result", utils::capture.output(print(value$value)))
    }
  }

  answer_error <- function(condition, calls) {
    value <- conditionMessage(condition)
    call <- conditionCall(condition)
    first <- if (is.null(call)) "Error" else paste("Error in", deparse(call)[1])
    lines <- c(paste0(first, ": ", paste(value, collapse = "\n")), traceback_of(calls))
    answer("error", class(condition)[1], value, lines)
  }

  # The calls of the code, without those around it.
  traceback_of <- function(calls) {
    texts <- vapply(calls, function(call) deparse(call)[1], "")
    begin <- which(texts == "eval(expression, globalenv())")
    own <- if (length(begin)) utils::tail(texts, -(begin[1] + 1)) else character()
    utils::head(own, -2)
  }

  execute <- function(code) {
    calls <- list()
    tryCatch(
      withCallingHandlers(allowInterrupts(run(code)), error = function(condition) calls <<- sys.calls()),
      error = function(condition) {
        # To look at it runs code of its own, which may fail.
        tryCatch(answer_error(condition, calls), error = function(another) {
          answer("error", "error", "an error that cannot be shown", "")
        })
      },
      interrupt = function(condition) answer("error", "Interrupt", "the code was interrupted", "")
    )
  }

  # An interrupt that came too late ends nothing.
  forget_interrupts <- function() {
    tryCatch(allowInterrupts(Sys.sleep(0)), interrupt = function(condition) NULL)
  }

  # Warnings come as the code runs.
  options(warn = 1)
  suspendInterrupts(repeat {
    request <- read()
    stay <- request[seq_len(as.integer(request[1])) + 1]
    rest <- request[-seq_len(length(stay) + 1)]
    lent <- rest[seq_len(as.integer(rest[1])) + 1]
    change(stay)
    # A copy of the sandbox draws other numbers.
    if (any(startsWith(stay, "E2B_SANDBOX_ID="))) set.seed(NULL)
    before <- change(lent)
    forget_interrupts()
    execute(rest[length(rest)])
    change(before)
    flush(stdout())
    answer("done")
  })
})
