pub struct FdTable {}
