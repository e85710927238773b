//! Pipes, eventfd, epoll, poll, select.
