//! Answers every request with a greeting. The standard library is enough for that.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// What is done before the first connection is done once, when the function is built.
const GREETING: &str = "Hello from Rust!";

fn answer(mut client: TcpStream) -> std::io::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    // The head of a request ends with an empty line.
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let target = first.split_whitespace().nth(1).unwrap_or("/");
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let name = query.split('&').find_map(|pair| pair.strip_prefix("name="));
    let body = format!("{GREETING} Nice to meet {}.\n", name.unwrap_or("you"));
    write!(
        client,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

fn main() -> std::io::Result<()> {
    let port = std::env::var("PORT").ok().and_then(|port| port.parse().ok()).unwrap_or(8080);
    let server = TcpListener::bind(("0.0.0.0", port))?;
    for client in server.incoming().flatten() {
        thread::spawn(move || {
            if let Err(error) = answer(client) {
                eprintln!("a client was not answered: {error}");
            }
        });
    }
    Ok(())
}
