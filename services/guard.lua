-- Ends a stream of events whose replica was lost with an error frame, so that a client can tell it from a whole one.
--
-- The end of a lost replica's stream looks so: nothing more can come in, and the message's end was not seen. A channel
-- whose buffer is full takes nothing in either, so more than half a buffer of unread events is left as it is: of a reader
-- that far behind the connection is cut instead, inside of a chunk, which its HTTP library tells.

local file, half = ...
half = tonumber(half)
local opened = assert(io.open(file, "rb"))
local lost = opened:read("a")
opened:close()

local StreamFilter = {id = "guard", flags = filter.FLT_CFG_FL_HTX}
StreamFilter.__index = StreamFilter

function StreamFilter:new()
    return setmetatable({}, StreamFilter)
end

function StreamFilter:http_headers(txn, message)
    if not message:is_resp() then
        return
    end
    local kind = message:get_headers()["content-type"]
    if kind ~= nil and kind[0]:sub(1, 17) == "text/event-stream" then
        filter.register_data_filter(self, message.channel)
    end
end

function StreamFilter:http_payload(txn, message)
    if message:eom() or message.channel:may_recv() then
        return
    end
    local unread = #(message:body() or "") + message:output()
    if unread < half and message:append(lost) > 0 then
        message:set_eom()
    end
end

core.register_filter("guard", StreamFilter, function(guard, arguments) return guard end)
