#[derive(Clone)] pub struct Path {}
